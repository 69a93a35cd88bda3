"""data_prep: what is said of inputs and of a data folder."""
