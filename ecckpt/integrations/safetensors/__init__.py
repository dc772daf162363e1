"""Export and import of folders of safetensors weights, as Hugging Face's tools lay them out."""
