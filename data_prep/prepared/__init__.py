"""Files of a data folder: token ids, the plan, unit entries and the manifest."""
