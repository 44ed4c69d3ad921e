"""A run's model in processes beside the driver's: on this machine, or through Ray on others."""
