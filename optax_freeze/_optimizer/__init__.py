"""What makes a gradient transformation."""
