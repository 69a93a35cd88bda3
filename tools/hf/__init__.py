"""Package of the Hugging Face format: export trained models to folders that stock transformers
loads, and import folders. No training, no evaluation.
"""
