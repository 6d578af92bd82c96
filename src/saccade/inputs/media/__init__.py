"""Images and videos: fetched, checked by their headers, and decoded in processes that can be killed."""
