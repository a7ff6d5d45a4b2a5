"""A rank of `test_loss.py`: the loss and its gradients over the candidates of all ranks, to a file."""

import sys

import torch
import torch.distributed as dist

from recsys_tpu.retrieval.loss import gather_rows, sampled_softmax


def loss_and_gradients(folder: str, rank: int, world_size: int) -> None:
    """Each rank takes its rows of the same global problem; files hold its mean loss and its gradients."""
    problem = torch.load(f"{folder}/problem.pt")
    rows = len(problem["query"]) // world_size
    own = slice(rank * rows, (rank + 1) * rows)
    query = problem["query"][own].clone().requires_grad_()
    items = problem["items"][own].clone().requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    losses = sampled_softmax(
        query,
        gather_rows(items, group),
        item_ids_B=problem["ids"][own],
        candidate_ids_C=problem["ids"],
        position_B=torch.arange(rows) + rank * rows,
        log_q_C=problem["log_q"],
        temperature=0.3,
        hard_negatives=0,
    )
    losses.sum().backward()
    torch.save(
        {"losses": losses.detach(), "query": query.grad, "items": items.grad}, f"{folder}/rank{rank}.pt"
    )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    loss_and_gradients(sys.argv[1], dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
