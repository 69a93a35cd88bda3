"""The demo: the whole product in one command, from text to a Hugging Face model and a report. It starts the other rooms' commands and reads
what they write; nothing of theirs is done here a second time."""
