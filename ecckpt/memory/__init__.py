"""Raw memory: the native module, buffer views and copies, file mappings, private folders."""
