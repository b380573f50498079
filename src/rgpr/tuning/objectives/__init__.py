"""What tuning can maximise, one file each: validation likelihood, outliers, marginal likelihood."""
