"""The processes of the ranks, as the node shows them: heartbeats, deaths, exit statuses, ranks that stand still."""
