// Tensor arguments from Python, checked before a kernel sees their addresses. Any array that speaks DLPack will do.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace sortrl {

namespace nb = nanobind;

// A call that no kernel can serve; Python sees a SortRLError.
struct BadCall : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// DLPack 1.3's exchange API, up to the one function used here: it shows a tensor without making a Python object. Torch
// has it since 2.10; through __dlpack__, the way of nb::ndarray, every tensor of a call costs 4 us.
struct ExchangeApi {
  uint32_t major, minor;
  const ExchangeApi* previous;
  void* unused[3];
  int (*show)(void* object, nb::dlpack::dltensor* out);
};

constexpr int64_t kAny = -1;
constexpr nb::dlpack::dtype kFloat = {uint8_t(nb::dlpack::dtype_code::Float), 32, 1};
constexpr nb::dlpack::dtype kDouble = {uint8_t(nb::dlpack::dtype_code::Float), 64, 1};
constexpr nb::dlpack::dtype kBool = {uint8_t(nb::dlpack::dtype_code::Bool), 8, 1};

// Borrows: the caller's arguments live as long as the call. To be made and destroyed with the GIL held.
class Argument {
 public:
  Argument(const char* name, nb::handle object, bool writable = false) : name_(name) {
    if (object.is_none()) return;
    const ExchangeApi* api = exchange_api(object);
    if (api) {
      if (api->show(object.ptr(), &view_) != 0) throw nb::python_error();
    } else {
      show_by_dlpack(object, writable);
    }
    given_ = true;
  }

  explicit operator bool() const { return given_; }
  int rank() const { return view_.ndim; }
  int64_t size(int axis) const { return view_.shape[axis]; }
  int64_t elements() const {
    int64_t n = 1;
    for (int d = 0; d < rank(); ++d) n *= size(d);
    return n;
  }

  // The address, once the tensor is contiguous, on the CPU, of this type and, unless `shape` is null, of this shape.
  float* floats() const { return static_cast<float*>(checked(kFloat, nullptr, 0)); }
  float* floats(std::initializer_list<int64_t> shape) const {
    return static_cast<float*>(checked(kFloat, shape.begin(), int(shape.size())));
  }
  // Of any shape with this many elements.
  const double* doubles(int64_t count) const {
    const auto* numbers = static_cast<const double*>(checked(kDouble, nullptr, 0));
    if (elements() != count)
      throw BadCall(std::string(name_) + " has " + std::to_string(elements()) + " numbers; expected " + std::to_string(count) + ".");
    return numbers;
  }
  const uint8_t* bools(std::initializer_list<int64_t> shape) const {
    return static_cast<const uint8_t*>(checked(kBool, shape.begin(), int(shape.size())));
  }

 private:
  static const ExchangeApi* exchange_api(nb::handle object) {
    static PyObject* const attribute = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    const nb::object capsule = nb::steal(PyObject_GetAttr((PyObject*)Py_TYPE(object.ptr()), attribute));
    if (!capsule.is_valid()) {
      PyErr_Clear();
      return nullptr;
    }
    const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!api) throw nb::python_error();
    while (api && api->major != 1) api = api->previous;
    return api && api->show ? api : nullptr;
  }

  void show_by_dlpack(nb::handle object, bool writable) {
    // Torch's __dlpack__ refuses tensors that require a gradient; kernels are below autograd and may read them.
    const nb::object source = nb::hasattr(object, "detach") ? object.attr("detach")() : nb::borrow(object);
    const bool readable = writable ? nb::try_cast(source, writable_) : nb::try_cast(source, readable_);
    if (!readable)
      throw BadCall(std::string(name_) + " is a " + nb::type_name(object.type()).c_str() + ", expected a " +
                    (writable ? "writable " : "") + "tensor.");
    const auto show = [&](const auto& array) {
      view_ = {const_cast<void*>(static_cast<const void*>(array.data())),
               {array.device_type(), array.device_id()},
               int32_t(array.ndim()),
               array.dtype(),
               const_cast<int64_t*>(array.shape_ptr()),
               const_cast<int64_t*>(array.stride_ptr()),
               0};
    };
    writable ? show(writable_) : show(readable_);
  }

  bool contiguous() const {
    if (!view_.strides || elements() == 0) return true;
    int64_t stride = 1;
    for (int d = rank() - 1; d >= 0; stride *= size(d--))
      if (size(d) != 1 && view_.strides[d] != stride) return false;
    return true;
  }

  void* checked(nb::dlpack::dtype type, const int64_t* shape, int rank) const {
    bool good = given_ && view_.dtype == type && view_.device.device_type == nb::device::cpu::value && contiguous();
    if (shape) {
      good = good && view_.ndim == rank;
      for (int d = 0; good && d < rank; ++d) good = shape[d] == kAny || shape[d] == size(d);
    }
    if (!good) throw BadCall(complaint(type, shape, rank));
    return static_cast<char*>(view_.data) + view_.byte_offset;
  }

  std::string complaint(nb::dlpack::dtype type, const int64_t* shape, int rank) const {
    std::string text = std::string(name_) + " is ";
    if (given_)
      text += type_name(view_.dtype) + " of shape " + shape_name(view_.shape, view_.ndim) +
              (contiguous() ? "" : ", not contiguous") +
              (view_.device.device_type == nb::device::cpu::value ? "" : ", not on the CPU");
    else
      text += "None";
    text += "; expected a contiguous CPU tensor of " + type_name(type);
    return shape ? text + " and shape " + shape_name(shape, rank) + "." : text + ".";
  }

  static std::string type_name(nb::dlpack::dtype type) {
    static const char* const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    return (type.code < 7 ? kinds[type.code] : "unknown") + (type.code == 6 ? "" : std::to_string(type.bits));
  }

  static std::string shape_name(const int64_t* shape, int rank) {
    std::string text = "(";
    for (int d = 0; d < rank; ++d) text += (d ? ", " : "") + (shape[d] == kAny ? std::string("any") : std::to_string(shape[d]));
    return text + (rank == 1 ? ",)" : ")");
  }

  const char* name_;
  bool given_ = false;
  nb::dlpack::dltensor view_;
  nb::ndarray<nb::ro> readable_;  // what view_ points into, without the exchange API
  nb::ndarray<> writable_;
};

}  // namespace sortrl
