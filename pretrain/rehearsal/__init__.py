"""A step of one rank before there is a machine: the code that will train, on tensors without numbers, in a world of the true size."""
