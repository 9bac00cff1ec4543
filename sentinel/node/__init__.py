"""Places on this node that daemon, hooks and command line share: sockets, histories, locks."""
