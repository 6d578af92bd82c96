"""Images and videos: fetches them, checks their headers, and decodes them in processes that can be killed."""
