"""A solution of each exercise. Only the functions and classes to complete are here."""
