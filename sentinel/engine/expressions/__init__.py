"""The rule language: from the text of an expression to a plan that runs at each step."""
