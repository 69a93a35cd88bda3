"""data_prep: the verbs of the command line that make something, a file each."""
