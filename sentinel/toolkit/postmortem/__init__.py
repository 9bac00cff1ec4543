"""What a job that hung or died left behind, read for its cause.

files.py     flight-recorder dumps (pickle, JSON), torchrun's error files, logs; from anybody
words.py     what the ranks' logs say: watchdogs that gave up, exceptions, by rank
verdict.py   which rank is missing in which collective, and how it ended
"""
