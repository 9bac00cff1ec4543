"""The processes of the ranks, observed on their node: heartbeats, deaths, exit statuses, ranks that stand still."""
