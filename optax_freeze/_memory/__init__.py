"""Moving frozen parameters to host memory."""
