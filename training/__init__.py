"""Makes the model that ships with Saccade: vocabulary, data, training, export."""
