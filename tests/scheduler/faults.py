"""Bugs to plant in the scheduler: the fuzz test must find each of them."""

from __future__ import annotations

from surefoot.scheduler import kv_groups, prefix_cache, request, scheduler, step, waiting_queue

from .planting import Fault

FAULTS = (
    # Prefixes
    Fault(
        "match-leaves-no-token-to-compute",
        kv_groups,
        (("len(request.tokens) - 1 if", "len(request.tokens) if"),),
        shows_in_tokens=True,
    ),
    Fault(
        "uncommitted-pages-are-matchable",
        kv_groups,
        (
            (
                "self._full_page_keys(request, request.num_computed)",
                "self._full_page_keys(request, min(request.num_planned, len(request.tokens)))",
            ),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "a-failed-step-is-kept",
        scheduler,
        (
            (
                "finished.append(self._end(request, FinishReason.ERROR, result",
                "request.num_computed = min(request.num_planned, len(request.tokens)); self.kv.keep_prefix(request); "
                "finished.append(self._end(request, FinishReason.ERROR, result",
            ),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "a-held-page-is-given-away",
        prefix_cache,
        (
            (" and self.pool.holders[page] == 1", ""),
            ("        self.pool.drop(page)", "        self.pool.holders[page] = 0; self.pool.free.append(page)"),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "a-match-is-not-held",
        prefix_cache,
        (("            group.pool.retain(pages)\n", ""),),
    ),
    Fault(
        "the-namespace-is-ignored",
        request,
        (("self.asked.cache_namespace.encode() + ", ""),),
        shows_in_tokens=True,
    ),
    Fault(
        "pages-of-equal-tokens-are-one-whatever-came-before",
        prefix_cache,
        (
            (
                "            node = child\n            for g, group",
                "            node = self.root\n            for g, group",
            ),
            ("            path.append(child)\n            node = child\n", "            path.append(child)\n"),
            ("child = node.children[key] = Node(", "child = self.root.children[key] = Node("),
            ("                self.version += 1\n            node = self.root", "                self.version += 1"),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "a-tree-page-is-replaced",
        prefix_cache,
        (("                if node.pages[g] == NO_PAGE:\n", "                if node.pages[g] != page:\n"),),
    ),
    Fault(
        "nodes-without-pages-stay",
        prefix_cache,
        (("while node.parent is not None and not node.children", "while False and not node.children"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-removed-page-is-not-forgotten",
        prefix_cache,
        (("        self.node_of[page] = None\n", ""),),
    ),
    # Pages
    Fault(
        "pages-are-released-twice",
        kv_groups,
        (("[page for page in pages if page != NO_PAGE]", "[page for page in pages if page != NO_PAGE] * 2"),),
    ),
    Fault(
        "pages-are-not-released",
        scheduler,
        (("        self.kv.release(request)\n", "        request.leave_slot()\n"),),
    ),
    Fault(
        "released-pages-are-not-offered-for-eviction",
        prefix_cache,
        (("            if cached.node_of[page] is not None:\n", "            if False:\n"),),
    ),
    Fault(
        "page-append-one-column-late",
        scheduler,
        (("len(pages) - 1, pages[-1]", "len(pages), pages[-1]"),),
        shows_in_tokens=True,
    ),
    Fault(
        "page-append-one-token-late",
        scheduler,
        (("if start == len(request.pages[0]) * page_size", "if start == len(request.pages[0]) * page_size + 1"),),
        shows_in_tokens=True,
    ),
    Fault(
        "page-appends-of-one-group-alone",
        scheduler,
        (("step.page_appends.append((group, ", "step.page_appends.append((0, "),),
        shows_in_tokens=True,
    ),
    Fault(
        "too-few-pages-at-admission",
        kv_groups,
        (("columns = pages_for(len(request.tokens),", "columns = pages_for(len(request.tokens) - 1,"),),
        shows_in_tokens=True,
    ),
    # Windows
    Fault(
        "a-page-is-released-one-token-early",
        kv_groups,
        (("max(0, position - window + 1)", "max(0, position - window + 2)"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-page-is-released-one-page-early",
        kv_groups,
        (("first = end = first_column(", "first = end = 1 + first_column("),),
        shows_in_tokens=True,
    ),
    Fault(
        "pages-before-the-window-are-kept",
        kv_groups,
        (("            if first < end:\n", "            if False:\n"),),
    ),
    Fault(
        "a-match-ignores-windows",
        prefix_cache,
        (("        return path[:length]\n", "        return path\n"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-match-needs-one-page-less-than-the-window",
        prefix_cache,
        (("min(depth, self.groups[g].visible)", "min(depth, self.groups[g].visible - 1)"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-windowed-group-gives-leaves-only",
        prefix_cache,
        ((" and (self.is_windowed or not node.children)", " and not node.children"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-full-group-gives-pages-from-anywhere",
        prefix_cache,
        ((" and (self.is_windowed or not node.children)", ""),),
    ),
    Fault(
        "pages-beyond-the-window-are-allocated",
        kv_groups,
        (("end = min(columns, first + self.bounds.most_pages(group, len(request.tokens)))", "end = columns"),),
    ),
    Fault(
        "a-prompt-without-pages-goes-on",
        scheduler,
        (
            ("if self.kv.extend_prompt(request):", "if self.kv.extend_prompt(request) or True:"),
            ("            else:\n                self._preempt(request)\n", ""),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "one-group-short-of-pages-is-overlooked",
        kv_groups,
        (
            ("                    return False\n", "                    return g > 0\n"),
            ("pool.allocate(counts[g])", "pool.allocate(min(counts[g], len(pool.free)))"),
        ),
        shows_in_tokens=True,
    ),
    # Rows
    Fault(
        "a-slot-is-not-given-back",
        scheduler,
        (("        self.free_slots.append(request.slot)\n", ""),),
    ),
    Fault(
        "a-row-of-an-ended-request-is-committed",
        scheduler,
        (("            if request.ended:\n", "            if False:\n"),),
    ),
    Fault(
        "a-row-is-committed-by-id",
        scheduler,
        (("            if request.ended:\n", "            if request.id not in self.live:\n"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-preempted-request-loses-the-token-in-flight",
        scheduler,
        (
            (
                "            request.tokens.append(token)\n",
                "            if request.slot >= 0: request.tokens.append(token)\n",
            ),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "resumed-before-the-token-in-flight-is-known",
        scheduler,
        (
            ("request.rows_in_flight or not self._seat(request)", "not self._seat(request)"),
            ("if self.preemptions == preemptions", "if True"),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "preemption-keeps-num-planned",
        request,
        (("self.num_computed = self.num_planned = 0", "self.num_computed = 0"),),
    ),
    Fault(
        "preemption-keeps-the-tail-flag",
        request,
        (("self.num_planned = 0\n        self.tail_on_device = False\n", "self.num_planned = 0\n"),),
    ),
    Fault(
        "the-oldest-request-is-preempted",
        scheduler,
        (
            (
                "next(reversed(self.running.values()))\n            self._preempt",
                "next(iter(self.running.values()))\n            self._preempt",
            ),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "decodes-past-the-end",
        scheduler,
        (("start == request.end - 1", "start == request.end"),),
        shows_in_tokens=True,
    ),
    Fault(
        "the-last-but-one-token-samples",
        step,
        (("end == len(request.tokens)", "end >= len(request.tokens) - 1"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-stop-id-does-not-stop",
        scheduler,
        (("if token in request.stop_ids or len", "if len"),),
        shows_in_tokens=True,
    ),
    Fault(
        "min-tokens-without-the-prompt",
        step,
        (("len(asked.prompt_ids) + asked.min_new_tokens", "asked.min_new_tokens"),),
        shows_in_tokens=True,
    ),
    # Admission
    Fault(
        "the-queue-has-one-place-more",
        scheduler,
        (("if len(self.live) >= slots + places", "if len(self.live) > slots + places"),),
        shows_in_tokens=True,
    ),
    Fault(
        "cached-tokens-of-the-last-admission",
        scheduler,
        (("        if not request.preempted:\n", "        if True:\n"),),
        shows_in_tokens=True,
    ),
    Fault(
        "priority-is-ignored-in-the-queue",
        waiting_queue,
        (
            (
                "return not request.preempted, request.priority, request.arrival",
                "return not request.preempted, 0, request.arrival",
            ),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "cached-pages-go-before-priority",
        waiting_queue,
        (("lambda other: other.priority == front.priority", "lambda other: True"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-victim-has-a-row-in-the-step",
        scheduler,
        (
            (
                "victim = next(reversed(self.running.values()))",
                "victim = max(self.running.values(), key=lambda r: r.priority)",
            ),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "running-requests-are-in-order-of-admission",
        scheduler,
        (("        if not is_last:\n", "        if False:\n"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-sibling-is-admitted-early",
        scheduler,
        (("not leader.leads or leader.has_output", "not leader.leads or leader.slot >= 0"),),
        shows_in_tokens=True,
    ),
    Fault(
        "siblings-wait-in-a-circle",
        scheduler,
        (("leader is None or not leader.leads or", "leader is None or"),),
        shows_in_tokens=True,
    ),
    # Sampling
    Fault(
        "a-count-row-leaks",
        scheduler,
        (("            self.free_count_rows.append(request.count_row)\n", "            pass\n"),),
        shows_in_tokens=True,
    ),
    Fault(
        "two-requests-share-a-count-row",
        scheduler,
        (("self.free_count_rows.pop()", "self.free_count_rows[-1]"),),
        shows_in_tokens=True,
    ),
    Fault(
        "the-history-is-the-prompt-alone",
        step,
        (("history=tuple(request.tokens)", "history=asked.prompt_ids"),),
        shows_in_tokens=True,
    ),
    Fault(
        "prompt-logprobs-are-delivered-twice",
        step,
        (("_without_first(scored, known) if known else scored", "scored"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-prompt-to-be-scored-matches",
        kv_groups,
        (("return self.prefix_cache and request.is_scored", "return self.prefix_cache"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-chunk-lacks-the-target-after-it",
        step,
        (("min(end + 1, len(request.asked.prompt_ids))", "min(end, len(request.asked.prompt_ids))"),),
        shows_in_tokens=True,
    ),
    Fault(
        "prompt-logprobs-of-ended-requests-are-delivered",
        step,
        (("if row.targets and not request.ended", "if row.targets"),),
        shows_in_tokens=True,
    ),
    Fault(
        "logprobs-of-ended-requests-are-delivered",
        step,
        (("for request in asking if not request.ended", "for request in asking if request.id in by_id"),),
        shows_in_tokens=True,
    ),
)
