"""The write path: inverse transforms that turn completed trajectories into rows worth storing.

`ReplayBuffer.extend` runs them in reverse order of the list, so a stack is written
`[MCAdvantage(...), KLRewardTransform(...), RetrieveLogProb(...)]`.
"""
