"""One file a receiver, named as `type` in the settings.

Its `KIND` says how one is made, what its settings must have and how many messages it takes. Nothing else knows its
name.
"""
