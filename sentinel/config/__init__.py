"""Settings and receivers, as the user writes them: read and checked; mistakes are explained in words."""
