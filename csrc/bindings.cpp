// The only file that knows Python: checks numpy arrays, releases the GIL, turns C++ errors into iclperm's.
// More than 600 lines because all that Python may call is here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "checksum.hpp"
#include "isa.hpp"
#include "parallel.hpp"
#include "plan.hpp"
#include "prefix_tree.hpp"
#include "retain.hpp"
#include "rowwise.hpp"
#include "thin_product.hpp"
#include "tile_product.hpp"
#include "tree_attention.hpp"

namespace py = pybind11;

namespace {

// std::invalid_argument becomes iclperm.errors.RequestError, which is a ValueError. What a message quotes from outside
// may be no UTF-8.
void translate_errors() {
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const std::invalid_argument& error) {
      const std::string words(error.what());
      const auto text = py::reinterpret_steal<py::object>(
          PyUnicode_DecodeUTF8(words.data(), static_cast<py::ssize_t>(words.size()), "backslashreplace"));
      PyErr_SetObject(py::module_::import("iclperm.errors").attr("RequestError").ptr(), text.ptr());
    }
  });
}

// The message, which may ask Python for words, is made only where it is needed.
#define ICLPERM_REQUIRE(holds, ...)                         \
  do {                                                      \
    if (!(holds)) throw std::invalid_argument(__VA_ARGS__); \
  } while (false)

// Numpy takes no care of where a buffer or a view begins; reading a number elsewhere than at its size is undefined.
void require_aligned(const py::array& array, const char* name) {
  ICLPERM_REQUIRE(
      reinterpret_cast<std::uintptr_t>(array.data()) % static_cast<std::uintptr_t>(array.itemsize()) == 0,
      std::string(name) + " is not aligned to its elements' size");
}

// A contiguous one-dimensional array, converted where that loses nothing.
template <class T>
using Vector = py::array_t<T, py::array::c_style>;

template <class T>
std::span<const T> view(const Vector<T>& array, const char* name) {
  if (array.ndim() != 1)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.ndim()) + " axes; one is needed");
  require_aligned(array, name);
  return {array.data(), static_cast<std::size_t>(array.size())};
}

// What a Python object holds. None, an object of another type, and one whose __init__ never ran hold nothing.
template <class Class>
std::shared_ptr<Class> held_by(const py::handle& object, const std::string& name) {
  std::shared_ptr<Class> held;
  try {
    held = object.cast<std::shared_ptr<Class>>();
  } catch (const py::cast_error&) {
    held.reset();
  }
  const auto type_name = [](const py::handle& type) { return type.attr("__name__").cast<std::string>(); };
  ICLPERM_REQUIRE(held != nullptr, name + " is of type " + type_name(py::type::handle_of(object)) + "; a finished " +
                                       type_name(py::type::of<Class>()) + " is needed");
  return held;
}

// A read-only array over memory that `owner` keeps alive.
template <class T>
py::array_t<T> borrow(const std::vector<T>& values, const py::object& owner) {
  py::array_t<T> array(static_cast<py::ssize_t>(values.size()), values.data(), owner);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

// An array that takes the vector over.
template <class T>
py::array_t<T> adopt(std::vector<T>&& values) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  const auto size = static_cast<py::ssize_t>(owned->size());
  T* data = owned->data();
  py::capsule owner(owned.release(), [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(size, data, owner);
}

template <class Class, class T>
void array_property(py::class_<Class, std::shared_ptr<Class>>& bound, const char* name,
                    const std::vector<T>& (*get)(const Class&)) {
  bound.def_property_readonly(
      name, [get](const py::object& self) { return borrow(get(*held_by<Class>(self, "self")), self); });
}

// A method or property: pybind11 itself would let None and unfinished objects through.
template <class Class, class Function>
auto of_self(Function function) {
  return [function](const py::object& self) { return function(*held_by<Class>(self, "self")); };
}

#define ICLPERM_ARRAY(bound, Class, name, expression) \
  array_property(bound, name, +[](const Class& self) -> const auto& { return self.expression; })

void bind_tree(py::module_& module) {
  using iclperm::Rows;
  using iclperm::ScoredTree;
  py::class_<ScoredTree, std::shared_ptr<ScoredTree>> tree(module, "PrefixTree");
  ICLPERM_ARRAY(tree, ScoredTree, "tokens", tree.tokens);
  ICLPERM_ARRAY(tree, ScoredTree, "token_offsets", tree.token_offsets);
  ICLPERM_ARRAY(tree, ScoredTree, "parent", tree.parent);
  ICLPERM_ARRAY(tree, ScoredTree, "depth", tree.depth);
  ICLPERM_ARRAY(tree, ScoredTree, "subtree_end", tree.subtree_end);
  ICLPERM_ARRAY(tree, ScoredTree, "target_token", targets.token);
  ICLPERM_ARRAY(tree, ScoredTree, "target_id", targets.id);
  ICLPERM_ARRAY(tree, ScoredTree, "row_offsets", targets.row_offsets);
  ICLPERM_ARRAY(tree, ScoredTree, "row_items", targets.row_items);
  tree.def_property_readonly("num_nodes", of_self<ScoredTree>([](const ScoredTree& self) { return self.tree.num_nodes(); }));
  tree.def_property_readonly("num_tokens", of_self<ScoredTree>([](const ScoredTree& self) { return self.tree.num_tokens(); }));
  tree.def_property_readonly("max_depth", of_self<ScoredTree>([](const ScoredTree& self) { return self.tree.max_depth(); }));
  tree.def("check", of_self<ScoredTree>([](const ScoredTree& self) { self.tree.check(); }));

  module.def(
      "build_tree",
      [](const Vector<std::int32_t>& tokens, const Vector<std::int64_t>& offsets,
         const Vector<std::int64_t>& mark_offsets, const Vector<std::int32_t>& marks) {
        const Rows rows{view(tokens, "tokens"), view(offsets, "offsets")};
        const auto starts = view(mark_offsets, "mark_offsets");
        const auto depths = view(marks, "marks");
        auto built = std::make_shared<ScoredTree>();
        std::vector<std::int32_t> mark_node;
        {
          py::gil_scoped_release release;
          built->tree = iclperm::build_tree(rows, starts, depths, mark_node);
        }
        return py::make_tuple(built, adopt(std::move(mark_node)));
      },
      py::arg("tokens"), py::arg("offsets"), py::arg("mark_offsets"), py::arg("marks"));
  module.def(
      "build_requests",
      [](const Vector<std::int32_t>& tokens, const Vector<std::int64_t>& offsets,
         const Vector<std::int64_t>& score_begin) {
        const Rows rows{view(tokens, "tokens"), view(offsets, "offsets")};
        const auto begins = view(score_begin, "score_begin");
        py::gil_scoped_release release;
        return std::make_shared<ScoredTree>(iclperm::build_requests(rows, begins));
      },
      py::arg("tokens"), py::arg("offsets"), py::arg("score_begin"));
}

py::dict pack_arrays(iclperm::Pack&& pack) {
  py::dict arrays;
  arrays["token_ids"] = adopt(std::move(pack.token_ids));
  arrays["positions"] = adopt(std::move(pack.positions));
  arrays["visit_row_offsets"] = adopt(std::move(pack.visit_row_offsets));
  arrays["visit_pos"] = adopt(std::move(pack.visit_pos));
  arrays["span_offsets"] = adopt(std::move(pack.span_offsets));
  arrays["span_source"] = adopt(std::move(pack.span_source));
  arrays["span_begin"] = adopt(std::move(pack.span_begin));
  arrays["span_end"] = adopt(std::move(pack.span_end));
  arrays["retain_begin"] = adopt(std::move(pack.retain_begin));
  arrays["retain_end"] = adopt(std::move(pack.retain_end));
  arrays["retain_slot"] = adopt(std::move(pack.retain_slot));
  arrays["scored_rows"] = adopt(std::move(pack.scored_rows));
  arrays["pair_row"] = adopt(std::move(pack.pair_row));
  arrays["pair_id"] = adopt(std::move(pack.pair_id));
  arrays["pair_out"] = adopt(std::move(pack.pair_out));
  arrays["held_tokens"] = pack.held_tokens;
  return arrays;
}

void bind_plan(py::module_& module) {
  using iclperm::Plan;
  using iclperm::ScoredTree;
  py::class_<Plan, std::shared_ptr<Plan>> plan(module, "Plan");
  plan.def(py::init([](const py::object& contexts, std::vector<std::int32_t> ends,
                       const std::vector<py::object>& blocks, std::int64_t pack_tokens, std::int64_t kv_tokens,
                       std::int64_t unit_tokens) {
             std::shared_ptr<const ScoredTree> tree = held_by<ScoredTree>(contexts, "contexts");
             std::vector<std::shared_ptr<const ScoredTree>> frozen;
             for (const py::object& block : blocks)
               frozen.push_back(held_by<ScoredTree>(block, "blocks[" + std::to_string(frozen.size()) + "]"));
             py::gil_scoped_release release;
             return std::make_shared<Plan>(std::move(tree), std::move(ends), std::move(frozen),
                                           iclperm::Limits{pack_tokens, kv_tokens, unit_tokens});
           }),
           py::arg("contexts"), py::arg("ends"), py::arg("blocks"), py::kw_only(), py::arg("pack_tokens"),
           py::arg("kv_tokens"), py::arg("unit_tokens"));
  ICLPERM_ARRAY(plan, Plan, "unit_leaf_begin", units().leaf_begin);
  ICLPERM_ARRAY(plan, Plan, "unit_leaf_end", units().leaf_end);
  ICLPERM_ARRAY(plan, Plan, "unit_block", units().block);
  ICLPERM_ARRAY(plan, Plan, "unit_context_begin", units().context_begin);
  ICLPERM_ARRAY(plan, Plan, "unit_context_end", units().context_end);
  ICLPERM_ARRAY(plan, Plan, "unit_value_begin", units().value_begin);
  ICLPERM_ARRAY(plan, Plan, "unit_num_values", units().num_values);
  ICLPERM_ARRAY(plan, Plan, "unit_tokens", units().tokens);
  ICLPERM_ARRAY(plan, Plan, "unit_packs", units().packs);
  ICLPERM_ARRAY(plan, Plan, "unit_kv_peak", units().kv_peak);
  plan.def_property_readonly("num_units", of_self<Plan>([](const Plan& self) { return self.num_units(); }));
  plan.def_property_readonly("query_base", of_self<Plan>([](const Plan& self) { return self.query_base(); }));
  plan.def_property_readonly("pool_slots", of_self<Plan>([](const Plan& self) { return self.pool_slots(); }));
  plan.def(
      "held_after",
      [](const py::object& self, std::int64_t unit) { return held_by<Plan>(self, "self")->held_after(unit); },
      py::arg("unit"));
  plan.def(
      "predict",
      [](const py::object& self, std::int64_t unit, std::int32_t held) {
        const iclperm::Prediction p = held_by<Plan>(self, "self")->predict(unit, held);
        return py::make_tuple(p.tokens, p.packs, p.kv_peak);
      },
      py::arg("unit"), py::arg("held"));
  plan.def(
      "packs",
      [](const py::object& self, std::int64_t unit, std::int32_t held) {
        const std::shared_ptr<const Plan> planned = held_by<Plan>(self, "self");
        std::vector<iclperm::Pack> packs;
        {
          py::gil_scoped_release release;
          packs = planned->packs_of(unit, held);
        }
        py::list arrays;
        for (auto& pack : packs) arrays.append(pack_arrays(std::move(pack)));
        return arrays;
      },
      py::arg("unit"), py::arg("held"));
}

std::string shape_text(const py::array& array) { return py::str(array.attr("shape")).cast<std::string>(); }
std::string strides_text(const py::array& array) { return py::str(array.attr("strides")).cast<std::string>(); }

// float32, or bfloat16 seen as uint16, since numpy has no such type.
iclperm::Element element_of(const py::array& array, const char* name) {
  if (py::isinstance<py::array_t<float>>(array)) return iclperm::Element::float32;
  if (py::isinstance<py::array_t<std::uint16_t>>(array)) return iclperm::Element::bfloat16;
  throw std::invalid_argument(std::string(name) + " is " + py::str(array.dtype()).cast<std::string>() +
                              "; float32, or bfloat16 viewed as uint16, is needed");
}

// Element strides of all but the last axis, whose elements must lie side by side.
std::vector<std::int64_t> strides_of(const py::array& array, py::ssize_t ndim, iclperm::Element element,
                                     const char* name) {
  ICLPERM_REQUIRE(element_of(array, name) == element,
          std::string(name) + " is " + py::str(array.dtype()).cast<std::string>() + ", unlike the first array");
  ICLPERM_REQUIRE(array.ndim() == ndim,
          std::string(name) + " has shape " + shape_text(array) + "; " + std::to_string(ndim) + " axes are needed");
  const py::ssize_t size = array.itemsize();
  std::vector<std::int64_t> strides;
  for (py::ssize_t axis = 0; axis < ndim; ++axis) {
    const py::ssize_t bytes = array.size() == 0 ? size : array.strides(axis);
    ICLPERM_REQUIRE(bytes >= 0 && bytes % size == 0, std::string(name) + " has a stride of " + std::to_string(bytes) +
                                                 " bytes on axis " + std::to_string(axis) +
                                                 "; a multiple of its elements' size, not negative, is needed");
    strides.push_back(bytes / size);
  }
  ICLPERM_REQUIRE(array.size() == 0 || array.shape(ndim - 1) == 1 || strides.back() == 1,
          std::string(name) + " is not contiguous on its last axis (stride of " + std::to_string(strides.back()) +
              " elements)");
  require_aligned(array, name);
  return strides;
}

template <class Byte>
iclperm::HeadRows<Byte> head_rows_of(const py::array& array, Byte* data, iclperm::Element element,
                                     std::int64_t head_dim, const char* name) {
  const auto strides = strides_of(array, 3, element, name);
  ICLPERM_REQUIRE(array.shape(2) == head_dim,
                  std::string(name) + " has head dimension " + std::to_string(array.shape(2)) +
                                          " and q " + std::to_string(head_dim) + "; they must be equal");
  return {data, array.shape(0), array.shape(1), strides[0], strides[1]};
}

// Memory to write to: two elements in one place would hold whichever was written last.
void* writable(py::array& array, const char* name) {
  ICLPERM_REQUIRE(array.writeable(), std::string(name) + " is read-only");
  std::vector<std::pair<std::size_t, std::size_t>> steps;  // of axes that have any: bytes, and how many
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis)
    if (array.shape(axis) > 1)
      steps.emplace_back(std::abs(array.strides(axis)), static_cast<std::size_t>(array.shape(axis) - 1));
  std::sort(steps.begin(), steps.end());
  auto extent = static_cast<std::size_t>(array.itemsize());
  for (const auto& [bytes, count] : steps) {
    ICLPERM_REQUIRE(array.size() == 0 || bytes >= extent,
                    std::string(name) + " has elements that overlap (strides of " + strides_text(array) +
                        " bytes for shape " + shape_text(array) + "); give an array in which they lie apart");
    extent += bytes * count;
  }
  return array.mutable_data();
}

template <class T>
const T* sized(const Vector<T>& array, std::int64_t size, const char* name, const char* reason) {
  ICLPERM_REQUIRE(array.ndim() == 1 && array.size() == size,
                  std::string(name) + " has shape " + shape_text(array) + "; " +
                                                         std::to_string(size) + " entries are needed (" + reason + ")");
  require_aligned(array, name);
  return array.data();
}

void tree_attention(const py::array& q, const py::array& k_new, const py::array& v_new, const py::array& k_pool,
                    const py::array& v_pool, py::array& out, const Vector<std::int64_t>& visit_row_offsets,
                    const Vector<std::int64_t>& visit_pos, const Vector<std::int64_t>& span_offsets,
                    const Vector<std::int64_t>& span_source, const Vector<std::int64_t>& span_begin,
                    const Vector<std::int64_t>& span_end, const std::optional<Vector<std::int64_t>>& query_rows,
                    float scaling, float softcap, std::int64_t window, const std::optional<Vector<float>>& sinks,
                    int num_threads) {
  const iclperm::Element element = element_of(q, "q");
  const std::int64_t head_dim = q.ndim() == 3 ? q.shape(2) : 0;
  const auto heads = [&](const py::array& array, const char* name) {
    return head_rows_of<const void>(array, array.data(), element, head_dim, name);
  };
  const auto num_visits = static_cast<std::int64_t>(view(visit_pos, "visit_pos").size());
  const auto num_spans = static_cast<std::int64_t>(view(span_begin, "span_begin").size());
  const char* per_visit = "one per entry of visit_pos, and one more";
  const char* per_span = "one per entry of span_begin";
  const iclperm::TreeAttention call{
      .element = element,
      .head_dim = head_dim,
      .q = heads(q, "q"),
      .k_new = heads(k_new, "k_new"),
      .v_new = heads(v_new, "v_new"),
      .k_pool = heads(k_pool, "k_pool"),
      .v_pool = heads(v_pool, "v_pool"),
      .out = head_rows_of<void>(out, writable(out, "out"), element, head_dim, "out"),
      .visits = {.num_visits = num_visits,
                 .num_spans = num_spans,
                 .row_offsets = sized(visit_row_offsets, num_visits + 1, "visit_row_offsets", per_visit),
                 .pos = visit_pos.data(),
                 .span_offsets = sized(span_offsets, num_visits + 1, "span_offsets", per_visit),
                 .span_source = sized(span_source, num_spans, "span_source", per_span),
                 .span_begin = span_begin.data(),
                 .span_end = sized(span_end, num_spans, "span_end", per_span)},
      .query_rows = query_rows ? query_rows->data() : nullptr,
      .num_query_rows = query_rows ? static_cast<std::int64_t>(view(*query_rows, "query_rows").size()) : 0,
      .scaling = scaling,
      .softcap = softcap,
      .window = window,
      .sinks = sinks ? sized(*sinks, q.shape(1), "sinks", "one per head of q") : nullptr};
  const iclperm::Isa isa = iclperm::selected_isa();
  const py::gil_scoped_release release;
  iclperm::tree_attention(call, isa, num_threads);
}

void retain_rows(const py::array& rows, py::array& pool, const Vector<std::int64_t>& begin,
                 const Vector<std::int64_t>& end, const Vector<std::int64_t>& slot, int num_threads) {
  const iclperm::Element element = element_of(rows, "rows");
  const auto strides = strides_of(rows, 3, element, "rows");
  const auto pool_strides = strides_of(pool, 3, element, "pool");
  ICLPERM_REQUIRE(rows.shape(2) == pool.shape(2), "pool has shape " + shape_text(pool) + " and rows " +
                                                      shape_text(rows) + "; their last axes must be equal");
  const auto num_runs = static_cast<std::int64_t>(view(begin, "begin").size());
  const char* per_run = "one per entry of begin";
  const iclperm::Retained call{
      .element_size = rows.itemsize(),
      .head_dim = rows.shape(2),
      .rows = {rows.data(), rows.shape(0), rows.shape(1), strides[0], strides[1]},
      .pool = {writable(pool, "pool"), pool.shape(0), pool.shape(1), pool_strides[0], pool_strides[1]},
      .num_runs = num_runs,
      .begin = begin.data(),
      .end = sized(end, num_runs, "end", per_run),
      .slot = sized(slot, num_runs, "slot", per_run)};
  const py::gil_scoped_release release;
  iclperm::retain_rows(call, num_threads);
}

// The row stride of an array that has x's shape.
std::int64_t stride_like(const py::array& array, const py::array& x, iclperm::Element element, const char* name) {
  const auto strides = strides_of(array, 2, element, name);
  ICLPERM_REQUIRE(x.shape(0) == array.shape(0) && x.shape(1) == array.shape(1),
          std::string(name) + " has shape " + shape_text(array) + " and x " + shape_text(x) + "; they must be equal");
  return strides[0];
}

// As Python's ascii() writes it, whatever it holds.
std::string ascii(const py::str& text) {
  return py::reinterpret_steal<py::str>(PyObject_ASCII(text.ptr())).cast<std::string>();
}

iclperm::Activation activation_named(const py::str& kind) {
#define ICLPERM_FIND(name, value) \
  if (PyUnicode_CompareWithASCIIString(kind.ptr(), #name) == 0) return iclperm::Activation::name;
  ICLPERM_ACTIVATIONS(ICLPERM_FIND)
#undef ICLPERM_FIND
#define ICLPERM_LIST(name, value) " " #name
  throw std::invalid_argument("there is no activation " + ascii(kind) +
                              "; give one of:" ICLPERM_ACTIVATIONS(ICLPERM_LIST));
#undef ICLPERM_LIST
}

void activate(const py::str& kind, const py::array& x, py::array& out, const std::optional<py::array>& factor,
              int num_threads) {
  const iclperm::Activation activation = activation_named(kind);
  const iclperm::Element element = element_of(x, "x");
  const auto x_strides = strides_of(x, 2, element, "x");
  const iclperm::Elementwise call{.activation = activation,
                                  .element = element,
                                  .num_rows = x.shape(0),
                                  .num_columns = x.shape(1),
                                  .x = x.data(),
                                  .x_stride = x_strides[0],
                                  .y = writable(out, "out"),
                                  .y_stride = stride_like(out, x, element, "out"),
                                  .factor = factor ? factor->data() : nullptr,
                                  .factor_stride = factor ? stride_like(*factor, x, element, "factor") : 0};
  const iclperm::Isa isa = iclperm::selected_isa();
  const py::gil_scoped_release release;
  iclperm::elementwise(call, isa, num_threads);
}

// The numbers of one row that stands for all of x.
const void* row_like(const py::array& row, const py::array& x, iclperm::Element element, const char* name) {
  strides_of(row, 1, element, name);
  ICLPERM_REQUIRE(row.shape(0) == x.shape(1), std::string(name) + " has shape " + shape_text(row) + "; x asks for " +
                                                  std::to_string(x.shape(1)) + " entries");
  return row.data();
}

void check_eps(float eps) {
  ICLPERM_REQUIRE(std::isfinite(eps) && eps >= 0.0f,
                  "eps is " + std::to_string(eps) + "; it must be finite, and not negative");
}

void rms_norm(const py::array& x, const py::array& weight, py::array& out, std::optional<py::array> sum, float eps,
              float offset, int num_threads) {
  const iclperm::Element element = element_of(x, "x");
  const auto x_strides = strides_of(x, 2, element, "x");
  check_eps(eps);
  ICLPERM_REQUIRE(std::isfinite(offset), "offset is " + std::to_string(offset) + "; it must be a finite number");
  const iclperm::RmsNorm call{.element = element,
                              .num_rows = x.shape(0),
                              .num_columns = x.shape(1),
                              .x = x.data(),
                              .x_stride = x_strides[0],
                              .sum = sum ? writable(*sum, "sum") : nullptr,
                              .sum_stride = sum ? stride_like(*sum, x, element, "sum") : 0,
                              .weight = row_like(weight, x, element, "weight"),
                              .offset = offset,
                              .eps = eps,
                              .out = writable(out, "out"),
                              .out_stride = stride_like(out, x, element, "out")};
  const iclperm::Isa isa = iclperm::selected_isa();
  const py::gil_scoped_release release;
  iclperm::rms_norm(call, isa, num_threads);
}

void layer_norm(const py::array& x, const py::array& weight, py::array& out, const std::optional<py::array>& bias,
                std::optional<py::array> sum, float eps, int num_threads) {
  const iclperm::Element element = element_of(x, "x");
  const auto x_strides = strides_of(x, 2, element, "x");
  check_eps(eps);
  const iclperm::LayerNorm call{.element = element,
                                .num_rows = x.shape(0),
                                .num_columns = x.shape(1),
                                .x = x.data(),
                                .x_stride = x_strides[0],
                                .sum = sum ? writable(*sum, "sum") : nullptr,
                                .sum_stride = sum ? stride_like(*sum, x, element, "sum") : 0,
                                .weight = row_like(weight, x, element, "weight"),
                                .bias = bias ? row_like(*bias, x, element, "bias") : nullptr,
                                .eps = eps,
                                .out = writable(out, "out"),
                                .out_stride = stride_like(out, x, element, "out")};
  const iclperm::Isa isa = iclperm::selected_isa();
  const py::gil_scoped_release release;
  iclperm::layer_norm(call, isa, num_threads);
}

void rotate(py::array& x, const py::array& cosines, const py::array& sines, bool neighbours, int num_threads) {
  const iclperm::Element element = element_of(x, "x");
  const auto x_strides = strides_of(x, 3, element, "x");
  const auto cosine_strides = strides_of(cosines, 2, iclperm::Element::float32, "cosines");
  const auto sine_strides = strides_of(sines, 2, iclperm::Element::float32, "sines");
  for (const auto& [table, name] : {std::pair{&cosines, "cosines"}, std::pair{&sines, "sines"}}) {
    ICLPERM_REQUIRE(table->shape(0) == x.shape(0) && table->shape(1) == cosines.shape(1) && table->shape(1) % 2 == 0 &&
                table->shape(1) <= x.shape(2),
            std::string(name) + " has shape " + shape_text(*table) + "; x " + shape_text(x) +
                " asks for a row each of an even number of columns, at most its last axis, as many in both");
  }
  const iclperm::Rotation call{.element = element,
                               .turns_neighbours = neighbours,
                               .num_rows = x.shape(0),
                               .num_heads = x.shape(1),
                               .num_columns = cosines.shape(1),
                               .x = writable(x, "x"),
                               .row_stride = x_strides[0],
                               .head_stride = x_strides[1],
                               .cosines = static_cast<const float*>(cosines.data()),
                               .cosine_stride = cosine_strides[0],
                               .sines = static_cast<const float*>(sines.data()),
                               .sine_stride = sine_strides[0]};
  const iclperm::Isa isa = iclperm::selected_isa();
  const py::gil_scoped_release release;
  iclperm::rotate(call, isa, num_threads);
}

py::tuple head_rows(const py::array& logits, const Vector<std::int64_t>& pair_row, const Vector<std::int64_t>& pair_id,
                    float softcap, int num_threads) {
  const iclperm::Element element = element_of(logits, "logits");
  const auto strides = strides_of(logits, 2, element, "logits");
  const auto num_pairs = static_cast<std::int64_t>(view(pair_row, "pair_row").size());
  const py::ssize_t num_rows = logits.shape(0);
  py::array_t<float> logsumexp(num_rows);
  py::array_t<std::int32_t> argmax(num_rows);
  py::array_t<bool> finite(num_rows);
  py::array_t<float> gathered(num_pairs);
  const iclperm::HeadRowsCall call{.element = element,
                                   .num_rows = num_rows,
                                   .num_columns = logits.shape(1),
                                   .logits = logits.data(),
                                   .row_stride = strides[0],
                                   .softcap = softcap,
                                   .logsumexp = logsumexp.mutable_data(),
                                   .argmax = argmax.mutable_data(),
                                   .finite = finite.mutable_data(),
                                   .num_pairs = num_pairs,
                                   .pair_row = pair_row.data(),
                                   .pair_id = sized(pair_id, num_pairs, "pair_id", "one per entry of pair_row"),
                                   .gathered = gathered.mutable_data()};
  const iclperm::Isa isa = iclperm::selected_isa();
  {
    const py::gil_scoped_release release;
    iclperm::head_rows(call, isa, num_threads);
  }
  return py::make_tuple(logsumexp, argmax, finite, gathered);
}

void thin_product(const py::array& x, const py::array& weight, py::array& out, const std::optional<py::array>& bias,
                  std::int64_t block, bool bias_first, int num_threads) {
  const iclperm::Element element = element_of(x, "x");
  const auto x_strides = strides_of(x, 2, element, "x");
  const auto weight_strides = strides_of(weight, 2, element, "weight");
  const auto out_strides = strides_of(out, 2, element, "out");
  ICLPERM_REQUIRE(weight.shape(1) == x.shape(1) && x.shape(1) > 0,
                  "weight has shape " + shape_text(weight) + " and x " + shape_text(x) +
                      "; as many columns in both, and one at least, are needed");
  ICLPERM_REQUIRE(out.shape(0) == x.shape(0) && out.shape(1) == weight.shape(0),
                  "out has shape " + shape_text(out) + "; x " + shape_text(x) + " and weight " + shape_text(weight) +
                      " ask for a row of each and a column of the other");
  if (bias) strides_of(*bias, 1, element, "bias");
  ICLPERM_REQUIRE(!bias || bias->shape(0) == weight.shape(0), "bias has shape " + shape_text(*bias) + "; weight " +
                                                                  shape_text(weight) + " asks for an entry of each row");
  const std::int64_t size = element == iclperm::Element::float32 ? 1 : 2;  // numbers a column
  ICLPERM_REQUIRE(out.size() == 0 || (x.shape(1) | x_strides[0] | weight_strides[0] | block) % size == 0,
                  "x " + shape_text(x) + ", block " + std::to_string(block) +
                      ": bfloat16 needs even columns, strides and block");
  const iclperm::ThinProduct call{.element = element,
                                  .num_rows = x.shape(0),
                                  .num_columns = x.shape(1) / size,
                                  .num_outputs = weight.shape(0),
                                  .x = x.data(),
                                  .x_stride = x_strides[0] / size,
                                  .weight = weight.data(),
                                  .weight_stride = weight_strides[0] / size,
                                  .bias = bias ? bias->data() : nullptr,
                                  .bias_first = bias_first,
                                  .block = block / size,
                                  .y = writable(out, "out"),
                                  .y_stride = out_strides[0]};
  const iclperm::Isa isa = iclperm::selected_isa();
  const py::gil_scoped_release release;
  iclperm::thin_product(call, isa, num_threads);
}

void require_bfloat16(const py::array& array, const char* name) {
  ICLPERM_REQUIRE(element_of(array, name) == iclperm::Element::bfloat16, std::string(name) + " is not of bfloat16");
}

void tile_product(const py::array& x, const py::array& weight, py::array& out, const std::optional<py::array>& bias,
                  bool is_laid_out, int num_threads) {
  constexpr auto BFLOAT16 = iclperm::Element::bfloat16;
  require_bfloat16(x, "x");
  const auto x_strides = strides_of(x, 2, BFLOAT16, "x");
  const auto weight_strides = strides_of(weight, is_laid_out ? 1 : 2, BFLOAT16, "weight");
  const auto out_strides = strides_of(out, 2, BFLOAT16, "out");
  const std::int64_t num_outputs = out.shape(1), num_columns = x.shape(1);
  ICLPERM_REQUIRE(out.shape(0) == x.shape(0),
                  "out has shape " + shape_text(out) + "; x " + shape_text(x) + " asks for a row of each");
  const bool fits = is_laid_out ? weight.shape(0) == iclperm::laid_out_size(num_outputs, num_columns)
                                : weight.shape(0) == num_outputs && weight.shape(1) == num_columns;
  ICLPERM_REQUIRE(fits, "weight has shape " + shape_text(weight) + "; x " + shape_text(x) + " and out " +
                            shape_text(out) + " ask for another");
  if (bias) strides_of(*bias, 1, BFLOAT16, "bias");
  ICLPERM_REQUIRE(!bias || bias->shape(0) == num_outputs,
                  "bias has shape " + shape_text(*bias) + "; out " + shape_text(out) + " asks for an entry of each column");
  const auto numbers = [](const py::array& array) { return static_cast<const std::uint16_t*>(array.data()); };
  const iclperm::TileProduct call{.num_rows = x.shape(0),
                                  .num_columns = num_columns,
                                  .num_outputs = num_outputs,
                                  .x = numbers(x),
                                  .x_stride = x_strides[0],
                                  .weight = is_laid_out ? nullptr : numbers(weight),
                                  .weight_stride = weight_strides[0],
                                  .laid_out = is_laid_out ? numbers(weight) : nullptr,
                                  .bias = bias ? numbers(*bias) : nullptr,
                                  .y = static_cast<std::uint16_t*>(writable(out, "out")),
                                  .y_stride = out_strides[0]};
  const iclperm::Isa isa = iclperm::selected_isa();
  const py::gil_scoped_release release;
  iclperm::tile_product(call, isa, num_threads);
}

void lay_out_tiles(const py::array& weight, py::array& out, int num_threads) {
  require_bfloat16(weight, "weight");
  const auto strides = strides_of(weight, 2, iclperm::Element::bfloat16, "weight");
  strides_of(out, 1, iclperm::Element::bfloat16, "out");
  const std::int64_t size = iclperm::laid_out_size(weight.shape(0), weight.shape(1));
  ICLPERM_REQUIRE(out.shape(0) == size, "out has shape " + shape_text(out) + "; weight " + shape_text(weight) +
                                            " asks for " + std::to_string(size) + " numbers");
  const iclperm::TileProduct call{.num_rows = 0,
                                  .num_columns = weight.shape(1),
                                  .num_outputs = weight.shape(0),
                                  .x = nullptr,
                                  .x_stride = 0,
                                  .weight = static_cast<const std::uint16_t*>(weight.data()),
                                  .weight_stride = strides[0],
                                  .laid_out = nullptr,
                                  .bias = nullptr,
                                  .y = nullptr,
                                  .y_stride = 0};
  auto* const laid_out = static_cast<std::uint16_t*>(writable(out, "out"));
  const iclperm::Isa isa = iclperm::selected_isa();
  const py::gil_scoped_release release;
  iclperm::lay_out(call, laid_out, isa, num_threads);
}

std::uint64_t checksum(const py::array& matrix, int num_threads) {
  const auto strides = strides_of(matrix, 2, element_of(matrix, "matrix"), "matrix");
  const iclperm::Bytes bytes{.data = static_cast<const std::byte*>(matrix.data()),
                             .num_rows = matrix.shape(0),
                             .row_size = matrix.shape(1) * matrix.itemsize(),
                             .row_stride = strides[0] * matrix.itemsize()};
  const py::gil_scoped_release release;
  return iclperm::checksum(bytes, num_threads);
}

void bind_kernels(py::module_& module) {
  module.def("isa", [] { return iclperm::isa_name(iclperm::selected_isa()); });
  module.def("available_isas", [] {
    py::list names;
    for (const auto isa : {iclperm::Isa::baseline, iclperm::Isa::avx2, iclperm::Isa::avx512, iclperm::Isa::avx512_bf16,
                           iclperm::Isa::amx_bf16}) {
      if (iclperm::isa_available(isa)) names.append(iclperm::isa_name(isa));
    }
    return names;
  });
  module.def("thread_backend", &iclperm::thread_backend);
  module.def("tree_attention", &tree_attention, py::arg("q"), py::arg("k_new"), py::arg("v_new"), py::arg("k_pool"),
             py::arg("v_pool"), py::arg("out"), py::arg("visit_row_offsets"), py::arg("visit_pos"),
             py::arg("span_offsets"), py::arg("span_source"), py::arg("span_begin"), py::arg("span_end"), py::kw_only(),
             py::arg("query_rows") = py::none(), py::arg("scaling"), py::arg("softcap") = 0.0f, py::arg("window") = 0,
             py::arg("sinks") = py::none(), py::arg("num_threads") = 1);
  module.def("retain_rows", &retain_rows, py::arg("rows"), py::arg("pool"), py::arg("begin"), py::arg("end"),
             py::arg("slot"), py::kw_only(), py::arg("num_threads") = 1);
  module.def("activate", &activate, py::arg("kind"), py::arg("x"), py::arg("out"), py::arg("factor") = py::none(),
             py::kw_only(), py::arg("num_threads") = 1);
  module.def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("out"), py::arg("sum") = py::none(),
             py::kw_only(), py::arg("eps"), py::arg("offset") = 0.0f, py::arg("num_threads") = 1);
  module.def("layer_norm", &layer_norm, py::arg("x"), py::arg("weight"), py::arg("out"), py::arg("bias") = py::none(),
             py::arg("sum") = py::none(), py::kw_only(), py::arg("eps"), py::arg("num_threads") = 1);
  module.def("rotate", &rotate, py::arg("x"), py::arg("cosines"), py::arg("sines"), py::kw_only(),
             py::arg("neighbours") = false, py::arg("num_threads") = 1);
  const auto has_fused_products = [](bool bfloat16) {
    const auto element = bfloat16 ? iclperm::Element::bfloat16 : iclperm::Element::float32;
    return iclperm::has_fused_products(iclperm::selected_isa(), element);
  };
  module.def("has_fused_products", has_fused_products, py::kw_only(), py::arg("bfloat16") = false);
  module.def("thin_product", &thin_product, py::arg("x"), py::arg("weight"), py::arg("out"),
             py::arg("bias") = py::none(), py::kw_only(), py::arg("block"), py::arg("bias_first") = false,
             py::arg("num_threads") = 1);
  module.def("has_tile_products", [] { return iclperm::has_tile_products(iclperm::selected_isa()); });
  module.def("laid_out_size", &iclperm::laid_out_size, py::arg("num_outputs"), py::arg("num_columns"));
  module.def("tile_product", &tile_product, py::arg("x"), py::arg("weight"), py::arg("out"),
             py::arg("bias") = py::none(), py::kw_only(), py::arg("is_laid_out") = false, py::arg("num_threads") = 1);
  module.def("lay_out_tiles", &lay_out_tiles, py::arg("weight"), py::arg("out"), py::kw_only(),
             py::arg("num_threads") = 1);
  module.def("checksum", &checksum, py::arg("matrix"), py::kw_only(), py::arg("num_threads") = 1);
  module.def("head_rows", &head_rows, py::arg("logits"), py::arg("pair_row"), py::arg("pair_id"), py::kw_only(),
             py::arg("softcap") = 0.0f, py::arg("num_threads") = 1);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ core of iclperm: prefix trees, plans and CPU kernels.";
  module.attr("__version__") = ICLPERM_VERSION;
  translate_errors();
  bind_kernels(module);
  bind_tree(module);
  bind_plan(module);
}
