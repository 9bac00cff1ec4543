"""The daemon: takes in what ranks send, judges it, acts, tells people, and answers questions."""
