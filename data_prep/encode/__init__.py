"""data_prep: rows into documents, documents into ids, in worker processes."""
