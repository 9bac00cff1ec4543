"""The receivers: one file per type, named like `type` in the settings.

Its `KIND` says how a receiver is created, what its settings must have and how many messages it takes. Nothing else
knows its name.
"""
