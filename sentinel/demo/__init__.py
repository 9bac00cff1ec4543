"""`sentinel demo`: two runs of one script on damaged data, one with Sentinel, and what came of them."""
