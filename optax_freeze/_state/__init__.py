"""What reads the state that a transformation left."""
