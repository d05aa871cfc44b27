// Memory for weights and buffers. Huge pages, because a step reads all weights once: with small ones a third of its
// time goes into looking up addresses.
#pragma once

#include <cstdint>
#include <memory>

namespace antiphon {

// 64-byte aligned; large ones ask for huge pages. Zeroed unless the caller is going to write all of it. Free with `free`.
void* allocate(int64_t bytes, bool zeroed = true);

// A piece of a slab that pieces taken one after the other share, so that small ones lie in huge pages, too. A slab
// lives as long as any of its pieces.
std::shared_ptr<char> take_piece(int64_t bytes);

}  // namespace antiphon
