"""The rules that a daemon applies, stock rules and the user's, and the conversion of steps for them."""
