"""Bitwise checks that frozen parameters have not changed."""
