"""What the networks of many runs are computed with, as it is fastest on the device at hand."""
