"""data_prep: what lies in a data folder: files of ids, the plan, entries and the manifest."""
