"""Conversion of rows into documents and of documents into token ids, in worker processes."""
