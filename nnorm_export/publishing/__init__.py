"""write_card(): the folder of a model for the Hugging Face Hub, with its model card."""
