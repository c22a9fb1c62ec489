"""What to run, as pure data: `get_config()` functions that change base()."""
