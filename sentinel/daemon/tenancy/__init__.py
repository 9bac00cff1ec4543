"""Ownership of runs on a node whose users share a daemon: histories, silences and receivers of each user."""
