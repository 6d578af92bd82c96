"""Text: messages, chat templates, tokens and back, prompts of rerankers and embeddings."""
