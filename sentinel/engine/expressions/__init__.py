"""The rule language: from the text of an expression to a plan that is run at each step."""
