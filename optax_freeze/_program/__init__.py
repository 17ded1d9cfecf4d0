"""A traced function as one list of equations, and the evaluation of parts of it."""
