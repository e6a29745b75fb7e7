// Rows of ids by an id map, as torch sees it. Apart from bind.cpp, as no lookup needs it: it comes before them.
#include "idmap.h"

#include "bind.h"
#include "isa.h"

namespace {

using namespace rowwise;

constexpr int64_t ids_per_task = 4096;
constexpr int64_t most_ids = INT64_C(1) << 40, most_rows = INT64_C(1) << 48, most_bits = 48, most_columns = 256;

bool within(int64_t x, int64_t least, int64_t most) { return x >= least && x <= most; }

int64_t words_needed(const IdSection& s, int64_t known) {
  if (s.kind == every_kind) return words_of(known, s.entry_bits);
  return s.is_set() && s.count ? SetLayout(s, known).end : 0;
}

void check_section(const IdSection& s, int64_t index, const IdMap& map, int64_t words) {
  STD_TORCH_CHECK(within(s.kind, hash_kind, rest_kind) && within(s.column, 0, map.columns - 1), "rowwise: section ",
                  index, " of an id map is of kind ", s.kind, " in column ", s.column, " of ", map.columns);
  STD_TORCH_CHECK(within(s.rows, s.kind == hash_kind, most_rows) && within(s.base, 0, most_rows) && s.divisor > 0,
                  "rowwise: section ", index, " of an id map has ", s.rows, " rows from ", s.base, " on, divisor ",
                  s.divisor);
  STD_TORCH_CHECK(
      within(s.count, 0, map.known) && within(s.low_bits, 0, most_bits) && within(s.entry_bits, 0, most_bits),
      "rowwise: section ", index, " of an id map has ", s.count, " of ", map.known, " ids, with ", s.low_bits, " and ",
      s.entry_bits, " bits each");
  STD_TORCH_CHECK(within(s.at, 0, words) && words_needed(s, map.known) <= words - s.at, "rowwise: section ", index,
                  " of an id map reaches past its ", words, " words");
}

Tensor map_ids(const Tensor& ids, const Tensor& sections, const Tensor& words, int64_t known, int64_t columns) {
  const Integers given(ids, "ids");
  check_tensor(sections, ScalarType::Long, "sections");
  check_tensor(words, ScalarType::Long, "words");
  STD_TORCH_CHECK(ids.dim() == 1 && words.dim() == 1 && sections.dim() == 2 && sections.size(1) == 10,
                  "rowwise: map_ids wants ids [N], sections [S, 10], words [W]");
  STD_TORCH_CHECK(within(known, 1, most_ids) && within(columns, 1, most_columns), "rowwise: an id map of ", known,
                  " ids in ", columns, " columns");
  const IdMap map{static_cast<const IdSection*>(sections.const_data_ptr()), sections.size(0),
                  static_cast<const uint64_t*>(words.const_data_ptr()), known, columns};
  for (int64_t s = 0; s < map.num_sections; ++s) check_section(map.sections[s], s, map, words.numel());
  Tensor out = rowwise::empty({given.count, columns}, ScalarType::Long);
  int64_t* const rows = out.mutable_data_ptr<int64_t>();
  const char* const first = static_cast<const char*>(given.data);
  each_task((given.count + ids_per_task - 1) / ids_per_task, [&](int64_t task) {
    const int64_t begin = task * ids_per_task, some = std::min(ids_per_task, given.count - begin);
    kernels().map_ids(first + begin * (given.wide ? 8 : 4), given.wide, some, map, rows + begin * columns);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rowwise, m) {
  m.def("map_ids(Tensor ids, Tensor sections, Tensor words, int known, int columns) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rowwise, CPU, m) { m.impl("map_ids", TORCH_BOX(&map_ids)); }
