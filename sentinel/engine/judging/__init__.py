"""Apply rules to a run: whether each fires, the incidents, and the state that is kept of them."""
