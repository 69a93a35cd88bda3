"""Room of the Hugging Face format: what is trained here, loaded by stock transformers. No training, no evaluation."""
