"""fem_common: the ground floor: what every room needs and one place must decide. Standard library alone; no room may come in."""
