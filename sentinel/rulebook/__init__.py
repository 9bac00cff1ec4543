"""The rules that a daemon applies: stock rules and the user's, loaded, and steps as rules see them."""
