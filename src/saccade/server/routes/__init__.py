"""The routes that run the model: OpenAI's, Anthropic's, SGLang's, and those for vectors and scores."""
