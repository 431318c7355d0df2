"""The controller: one thread that receives, decides by the policies, commits one transaction, then sends."""
