"""Tools that need no daemon: doctor, plan, memory, precision, post-mortem, logs, backtest."""
