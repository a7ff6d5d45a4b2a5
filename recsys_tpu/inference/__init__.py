"""A trained click model outside of training: its dense part as a program, its tables in int8."""
