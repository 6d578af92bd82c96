"""Text: messages, chat templates, tokenizers, and the prompts of rerankers and embedding models."""
