"""fem_common: the ground floor: what every room needs and one place must decide. Importing it loads the standard library alone."""
