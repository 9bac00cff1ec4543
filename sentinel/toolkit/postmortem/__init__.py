"""Finds the cause in the files that a job left when it hung or died.

files.py     flight-recorder dumps (pickle, JSON), torchrun's error files, logs; none of them is trusted
words.py     what the ranks' logs say: watchdogs that gave up, exceptions, by rank
verdict.py   which rank is missing in which collective, and how it ended
"""
